"""Tasks with verifiers, small enough to train on a CPU, and loaders of prompts: what claims, demo and commands run
on."""
