"""`python -m coordinator.cli` is the command `coordinator`."""

from coordinator.cli import main

if __name__ == "__main__":
    main(prog_name="coordinator")
