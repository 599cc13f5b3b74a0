"""`python -m deploy.cli`: the same as `baton`."""

from deploy.cli import main

main()
