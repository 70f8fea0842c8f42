"""`python -m vitclinic`, as torchrun needs it."""

from vitclinic.cli import main

if __name__ == "__main__":
    main()
