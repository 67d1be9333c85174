"""Mazes as token sequences, after the paper's App. E.1: Prim's algorithm on an odd grid, start (1, 1), goal (n-2, n-2).

A prompt is ``<bos> GRID_START`` then a token per cell with ``NEWLINE`` after each row, ``GRID_END PATH_START``; the
answer is actions and ``DONE <eos>``. A rollout passes when every token before ``DONE`` is an action and walking them
reaches the goal; a step into a wall or off the grid fails, and what follows after the goal does not matter.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

ACTIONS = {"UP": (-1, 0), "DOWN": (1, 0), "LEFT": (0, -1), "RIGHT": (0, 1)}
TOKENS = (
    *("<pad>", "<bos>", "<eos>", "GRID_START", "GRID_END", "PATH_START", "NEWLINE"),
    *("WALL", "PATH", "START", "GOAL", *ACTIONS, "DONE"),
)


@dataclass(frozen=True)
class Maze:
    """``walls`` (n, n) bool, start and goal as (row, column)."""

    walls: np.ndarray
    start: tuple[int, int]
    goal: tuple[int, int]

    @property
    def prompt(self) -> str:
        """The maze as tokens, up to where the actions begin."""
        words = ["<bos>", "GRID_START"]
        for row in range(self.walls.shape[0]):
            for column in range(self.walls.shape[1]):
                here = (row, column)
                names = {self.start: "START", self.goal: "GOAL"}
                words.append(names.get(here, "WALL" if self.walls[here] else "PATH"))
            words.append("NEWLINE")
        return " ".join([*words, "GRID_END", "PATH_START"])

    def shortest_path(self) -> list[str]:
        """Actions of a shortest way from start to goal, by breadth-first search."""
        came: dict[tuple[int, int], tuple[tuple[int, int], str] | None] = {self.start: None}
        queue = deque([self.start])
        while queue:
            here = queue.popleft()
            if here == self.goal:
                break
            for name, (dr, dc) in ACTIONS.items():
                there = (here[0] + dr, here[1] + dc)
                if there not in came and self.is_free(there):
                    came[there] = (here, name)
                    queue.append(there)
        if self.goal not in came:
            raise ValueError("the maze has no way from start to goal")
        actions: list[str] = []
        step = came[self.goal]
        while step is not None:
            actions.append(step[1])
            step = came[step[0]]
        return actions[::-1]

    def is_free(self, cell: tuple[int, int]) -> bool:
        """Whether a cell is on the grid and no wall."""
        rows, columns = self.walls.shape
        return 0 <= cell[0] < rows and 0 <= cell[1] < columns and not self.walls[cell]

    def render(self, path: Sequence[str] = ()) -> str:
        """The maze in characters: ``#`` wall, ``S`` start, ``G`` goal, ``.`` where ``path`` went."""
        cells = np.where(self.walls, "#", " ")
        here = self.start
        for name in path:
            there = (here[0] + ACTIONS[name][0], here[1] + ACTIONS[name][1])
            if not self.is_free(there):
                break
            here = there
            cells[here] = "."
        cells[self.start], cells[self.goal] = "S", "G"
        return "\n".join("".join(row) for row in cells)


def make_maze(size: int, rng: np.random.Generator) -> Maze:
    """A maze by randomised Prim on an odd grid of ``size`` >= 5: every free cell is reached by exactly one way."""
    if size < 5 or size % 2 == 0:
        raise ValueError(f"size = {size}: an odd number of at least 5 is needed")
    walls = np.ones((size, size), dtype=bool)
    walls[1, 1] = False
    frontier = [((1, 1), (3, 1)), ((1, 1), (1, 3))]
    while frontier:
        here, there = frontier.pop(int(rng.integers(len(frontier))))
        if not walls[there]:
            continue
        walls[there] = walls[(here[0] + there[0]) // 2, (here[1] + there[1]) // 2] = False
        for dr, dc in ACTIONS.values():
            beyond = (there[0] + 2 * dr, there[1] + 2 * dc)
            if 0 < beyond[0] < size - 1 and 0 < beyond[1] < size - 1 and walls[beyond]:
                frontier.append((there, beyond))
    return Maze(walls, (1, 1), (size - 2, size - 2))


def parse_maze(sequence: str) -> Maze:
    """The maze of a token sequence; ValueError when it holds none."""
    words = sequence.split()
    try:
        inside = words[words.index("GRID_START") + 1 : words.index("GRID_END")]
    except ValueError:
        raise ValueError("no GRID_START ... GRID_END in the sequence") from None
    rows: list[list[str]] = [[]]
    for word in inside:
        if word == "NEWLINE":
            rows.append([])
        elif word in ("WALL", "PATH", "START", "GOAL"):
            rows[-1].append(word)
        else:
            raise ValueError(f"unknown cell {word!r}: cells are WALL, PATH, START and GOAL")
    rows = [row for row in rows if row]
    if not rows or len({len(row) for row in rows}) != 1:
        raise ValueError("the rows of the grid have different lengths")
    grid = np.array(rows)
    ends = [np.argwhere(grid == name) for name in ("START", "GOAL")]
    if any(len(found) != 1 for found in ends):
        raise ValueError("the grid needs one START and one GOAL")
    start, goal = ((int(found[0][0]), int(found[0][1])) for found in ends)
    return Maze(grid == "WALL", start, goal)


def judge(answer: str, maze: Maze | str) -> bool:
    """Whether the actions of ``answer`` solve the maze."""
    maze = parse_maze(maze) if isinstance(maze, str) else maze
    words = answer.split()
    if "DONE" not in words:
        return False
    actions = words[: words.index("DONE")]
    if any(action not in ACTIONS for action in actions):
        return False
    here = maze.start
    for action in actions:
        here = (here[0] + ACTIONS[action][0], here[1] + ACTIONS[action][1])
        if not maze.is_free(here):
            return False
        if here == maze.goal:
            return True
    return here == maze.goal


def make_mazes(count: int, size: int, seed: int) -> Iterator[dict[str, object]]:
    """``count`` distinct-seeded mazes as rows ``{"prompt", "answer", "sequence", "optimal_path_length", "size"}``;
    ``answer`` is the prompt, from which the verifier ``maze`` reads the grid."""
    rng = np.random.default_rng(seed)
    for _ in range(count):
        maze = make_maze(size, rng)
        path = maze.shortest_path()
        sequence = f"{maze.prompt} {' '.join(path)} DONE <eos>"
        yield {
            "prompt": maze.prompt,
            "answer": maze.prompt,
            "sequence": sequence,
            "optimal_path_length": len(path),
            "size": size,
        }


def load_mazes(path: str | Path) -> list[tuple[Maze, int]]:
    """Mazes and shortest path lengths of the public format: a JSON list, or JSON lines, of
    ``{"sequence": ..., "optimal_path_length": ...}``."""
    text = Path(path).read_text(encoding="utf-8")
    try:
        rows = (
            json.loads(text)
            if text.lstrip().startswith("[")
            else [json.loads(s) for s in text.splitlines() if s.strip()]
        )
        return [(parse_maze(row["sequence"]), int(row["optimal_path_length"])) for row in rows]
    except (json.JSONDecodeError, KeyError, TypeError) as error:
        raise ValueError(f"{path}: not in the maze format ({error!r})") from None
