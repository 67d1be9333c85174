"""The tasks claims and demo run on: mazes, digits, addition, bandit."""

import json

import numpy as np
import pytest
import torch

from maxrl import maxrl_advantages
from maxrl.baselines import differential_smoothing
from maxrl.eval import addition, bandit, digits, maze, maze_training, one_line
from maxrl.eval.transformer import TinyTransformer, completion_log_probs, sample


def test_mazes_are_trees_with_the_papers_ends():
    for size in (5, 9, 17):
        made = maze.make_maze(size, np.random.default_rng(size))
        assert (made.start, made.goal) == ((1, 1), (size - 2, size - 2))
        assert made.walls[[0, -1]].all()
        assert made.walls[:, [0, -1]].all()
        free = ~made.walls
        # A spanning tree over the rooms: (rooms) cells and (rooms - 1) passages.
        rooms = ((size - 1) // 2) ** 2
        assert free.sum() == 2 * rooms - 1
        path = made.shortest_path()
        assert maze.judge(" ".join([*path, "DONE"]), made)
        again = maze.parse_maze(f"{made.prompt} {' '.join(path)} DONE <eos>")
        assert (again.walls == made.walls).all()
    with pytest.raises(ValueError, match="an odd number of at least 5"):
        maze.make_maze(8, np.random.default_rng(0))


def test_maze_verifier_rules():
    rows = ("WALL WALL WALL WALL", "WALL START PATH WALL", "WALL WALL GOAL WALL", "WALL WALL WALL WALL")
    text = f"<bos> GRID_START {' NEWLINE '.join(rows)} NEWLINE GRID_END PATH_START"
    assert maze.judge("RIGHT DOWN DONE", text)
    assert maze.judge("RIGHT DOWN DONE <eos>", text)
    assert maze.judge("RIGHT DOWN UP UP UP DONE", text)  # what follows the goal does not matter
    assert not maze.judge("RIGHT DOWN", text)  # no DONE
    assert not maze.judge("RIGHT RIGHT DONE", text)  # a wall
    assert not maze.judge("RIGHT WALL DOWN DONE", text)  # not an action
    assert not maze.judge("RIGHT DONE", text)
    for bad, message in (
        ("UP DONE", "no GRID_START"),
        ("GRID_START START GOAL NEWLINE WALL GRID_END", "different lengths"),
        ("GRID_START START PATH GRID_END", "one START and one GOAL"),
        ("GRID_START START LAVA GRID_END", "unknown cell 'LAVA'"),
    ):
        with pytest.raises(ValueError, match=message):
            maze.parse_maze(bad)


def test_maze_files(tmp_path):
    rows = list(maze.make_mazes(3, 7, seed=1))
    assert rows == list(maze.make_mazes(3, 7, seed=1))
    public = [{"sequence": r["sequence"], "optimal_path_length": r["optimal_path_length"]} for r in rows]
    (tmp_path / "a.json").write_text(json.dumps(public))
    (tmp_path / "b.jsonl").write_text("\n".join(map(json.dumps, rows)))
    for name in ("a.json", "b.jsonl"):
        loaded = maze.load_mazes(tmp_path / name)
        assert [length for _, length in loaded] == [len(m.shortest_path()) for m, _ in loaded]
    (tmp_path / "c.json").write_text('[{"grid": 1}]')
    with pytest.raises(ValueError, match="not in the maze format"):
        maze.load_mazes(tmp_path / "c.json")


def test_digits_are_the_numbers_they_show():
    pytest.importorskip("sklearn")
    train, test = digits.number_images(500, seed=3), digits.number_images(500, split="test", seed=3)
    assert train.inputs.shape == (500, 128)
    assert train.labels.min() >= 0
    assert train.labels.max() <= 99
    assert not any((test.inputs[0, :64] == row[:64]).all() for row in train.inputs)
    three = digits.number_images(200, places=3)
    assert three.labels.max() > 99
    run = digits.Run("maxrl", 16, epochs=2, examples=640)
    first, second = (digits.exact_metrics(digits.train(run, 0), test) for _ in range(2))
    assert first == second
    start = digits.exact_metrics(digits.make_model(run, 0), test)
    assert start["pass@1"] == pytest.approx(0.01, abs=0.003)
    better = digits.exact_metrics(digits.train(digits.Run("cross_entropy", epochs=3, examples=2560), 0), test)
    assert better["nll"] < start["nll"] - 0.3


def test_sampling_loss_is_an_unbiased_estimate():
    """With the order-N estimator the expected gradient by the logits is w_N(p) grad p."""
    logits = torch.randn(1, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    labels, n = torch.tensor([2]), 4
    total, draws = torch.zeros(5, dtype=torch.float64), 3000
    generator = torch.Generator().manual_seed(1)
    run = digits.Run("conditional", n)
    for _ in range(draws):
        leaf = logits.clone().requires_grad_()
        digits.policy_loss(leaf, labels, run, generator).backward()
        total -= leaf.grad[0]
    p = logits.softmax(-1)[0]
    want = (1 - (1 - p[2]) ** n) / p[2] * p[2] * ((torch.arange(5) == 2).double() - p)
    assert (total / draws - want).abs().max() < 0.05


def test_transformer_cache_and_likelihoods_agree():
    torch.manual_seed(0)
    model = TinyTransformer(13, 12)
    prompts = torch.randint(0, 13, (3, 6))
    logits, cache = model.step(prompts[:, :4], None)
    for i in (4, 5):
        logits, cache = model.step(prompts[:, i : i + 1], cache)
    torch.testing.assert_close(logits[:, -1], model(prompts)[:, -1])
    drawn = sample(model, prompts, 4, 5, torch.Generator().manual_seed(0), stop=7)
    assert drawn.shape == (12, 5)
    for row in drawn.tolist():
        if 7 in row:
            assert set(row[row.index(7) :]) == {7}
    log_p = completion_log_probs(model, prompts, drawn[::4])
    full = torch.log_softmax(model(torch.cat([prompts, drawn[::4]], 1)), -1)
    torch.testing.assert_close(log_p[0, 2], full[0, 7, drawn[0, 2]])


def test_a_prompt_is_read_once_for_all_its_completions():
    torch.manual_seed(0)
    model = TinyTransformer(13, 12).double()
    prompts, completions = torch.randint(0, 13, (3, 6)), torch.randint(0, 13, (5, 4))
    owner = torch.tensor([2, 0, 0, 1, 2])
    shared = completion_log_probs(model, prompts, completions, owner)
    full = torch.log_softmax(model(torch.cat([prompts[owner], completions], 1)), -1)[:, 5:-1]
    torch.testing.assert_close(shared, full.gather(2, completions[:, :, None]).squeeze(2))
    assert completion_log_probs(model, prompts, completions[:, :1], owner).shape == (5, 1)


def test_differential_smoothing_and_entropy_bonus_by_hand():
    """GRPO's advantages with gamma on the mean log-probability, and the gradient of the entropy."""
    rewards, log_probs = torch.tensor([1, 0, 0]), torch.tensor([-2.0, -1.0, -3.0])
    assert differential_smoothing(rewards, log_probs, 0.1).tolist() == pytest.approx([0.2, -0.1, -0.3])
    with pytest.raises(ValueError, match="defined for rewards 0 and 1"):
        differential_smoothing(torch.tensor([0.5, 0, 0]), log_probs)
    with pytest.raises(ValueError, match="one of each per rollout"):
        differential_smoothing(rewards[:2], log_probs)
    with pytest.raises(ValueError, match="must be finite"):
        differential_smoothing(rewards, log_probs, float("nan"))

    def gradient(**changes):
        leaf = torch.randn(2, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64).requires_grad_()
        run = digits.Run("grpo", 8, **changes)
        digits.policy_loss(leaf, torch.tensor([2, 0]), run, torch.Generator().manual_seed(1)).backward()
        return leaf.detach(), leaf.grad

    logits, plain = gradient()
    p, log_p = logits.softmax(-1), logits.log_softmax(-1)
    entropy = -(p * log_p).sum(1, keepdim=True)
    want = -0.3 * -p * (log_p + entropy) / 2  # minus the gradient of the entropy, mean over two images
    torch.testing.assert_close(gradient(entropy_bonus=0.3)[1] - plain, want)
    actions = torch.multinomial(p, 8, replacement=True, generator=torch.Generator().manual_seed(1))
    right = actions == torch.tensor([[2], [0]])
    extra = -0.05 * (2.0 * right - 1) * log_p.gather(1, actions)
    score = torch.eye(5, dtype=torch.float64)[actions] - p[:, None]
    want = -(extra[:, :, None] * score).sum(1) / 16
    torch.testing.assert_close(gradient(smoothing=0.05)[1] - plain, want, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("changes", [{}, {"entropy_bonus": 0.5}, {"smoothing": 0.5}, {"estimator": "pkpo", "order": 2}])
def test_addition_counts_equal_completions_once_and_loses_nothing(changes):
    """The gradient over distinct completions is that over all rollouts one by one."""
    run = addition.Run(**{"estimator": "grpo", "prompts": 4, "rollouts": 64, "base_pass": 0.05, **changes})
    model, (pairs, _) = addition.base_model(0, 0.05), addition.split()
    plain = torch.optim.SGD(model.parameters(), lr=0.0)
    addition._step(run, model, plain, pairs, torch.Generator().manual_seed(3))
    got = torch.cat([p.grad.flatten() for p in model.parameters()])
    generator = torch.Generator().manual_seed(3)
    chosen = pairs[torch.randint(0, len(pairs), (4,), generator=generator)]
    prompts, answers = addition.encode(chosen)
    completions = sample(model, prompts, 64, 3, generator)
    rewards = (completions == answers.repeat_interleave(64, 0)).all(1)
    assert 0 < rewards.sum() < 256
    logits = model(torch.cat([prompts.repeat_interleave(64, 0), completions[:, :-1]], 1))[:, 6:]
    log_p = torch.log_softmax(logits, -1)
    picked = log_p.gather(2, completions[:, :, None]).squeeze(2)
    a = maxrl_advantages(rewards, group_size=64, estimator=run.estimator, order=run.order)
    a = a + run.smoothing * (1 - 2 * rewards.float()) * picked.mean(1).detach()
    loss = -(a[:, None] * picked).sum() / (256 * 3)
    loss = loss + run.entropy_bonus * (log_p.exp() * log_p).sum(-1).mean()
    model.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    want = torch.cat([p.grad.flatten() for p in model.parameters()])
    assert (got - want).norm() < 1e-4 * want.norm()


def test_addition_resumes_to_the_same_result(tmp_path):
    prompts, answers = addition.encode(torch.tensor([[7, 95], [40, 2]]))
    assert prompts.tolist() == [[10, 0, 7, 11, 9, 5, 12], [10, 4, 0, 11, 0, 2, 12]]
    assert answers.tolist() == [[1, 0, 2], [0, 4, 2]]
    train, test = addition.split()
    assert {tuple(x) for x in test.tolist()}.isdisjoint(tuple(x) for x in train.tolist())
    run = addition.Run(steps=6, prompts=4, rollouts=4, base_pass=0.0)
    straight = addition.train(run)

    class Killed(Exception):
        pass

    def kill(done, of):
        if done == 5:
            raise Killed

    with pytest.raises(Killed):
        addition.train(run, checkpoint=tmp_path / "state", every=2, step=kill)
    assert addition.train(run, checkpoint=tmp_path / "state", every=2) == straight
    with pytest.raises(ValueError, match="belongs to another run"):
        addition.train(addition.Run(steps=7, prompts=4, rollouts=4, base_pass=0.0), checkpoint=tmp_path / "state")


def test_bandit_objectives_climb_their_own_hill():
    made = bandit.make_bandit(0, prompts=8, actions=10, rank=4)
    prior = made.log_p(torch.zeros(4, 4, dtype=torch.float64))
    assert prior.exp().min() >= 1e-4
    assert prior.exp().max() <= 0.5
    likelihood = bandit.ascend(made, "ml", steps=40, size=0.1)
    rl = bandit.ascend(made, "rl", steps=40, size=0.1)
    assert likelihood.mean() > prior.mean()
    assert rl.exp().mean() > prior.exp().mean()
    assert likelihood.mean() > rl.mean()


def test_maze_training_runs_on_its_own_rollouts():
    run = maze_training.Run(size=5, steps=2, prompts=4, rollouts=8, sft_steps=150)
    first = [p.detach().clone() for p in maze_training.base_model(run).parameters()]
    model = maze_training.train(run)
    assert any((a != b).any() for a, b in zip(first, model.parameters(), strict=True))
    curve = maze_training.coverage(model, run, mazes=6, rollouts=8)
    assert (np.diff(curve.values) >= 0).all()
    assert curve.values[-1] > 0  # a 5 x 5 maze has one of two shortest paths


def test_the_change_is_one_line():
    changed = one_line.changed_lines()
    assert [line[:2] for line in changed] == ["- ", "+ "]
    assert all("advantages = maxrl_advantages(" in line for line in changed)
