"""`python -m deploy.cli`: the same as `baton`."""

from deploy.cli.app import main

main()
