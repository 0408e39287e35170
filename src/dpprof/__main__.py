"""``python -m dpprof`` is the command ``dpprof``, where its folder is not on the PATH."""

from dpprof.ask.commands.main import main

if __name__ == "__main__":
    main()
