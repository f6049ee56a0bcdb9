"""`python -m hpcrl`, and the console script."""

from hpcrl.cli import run


def main() -> None:
    """Run the command line of this process."""
    run()


if __name__ == "__main__":
    main()
