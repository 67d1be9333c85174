"""Models and harnesses that claims, demo and tests run on."""
