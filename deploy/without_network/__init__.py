"""Installing where there is no network: wheels fetched on one machine, installed on another beside what lies there.

Only the standard library and pip: this is what runs before anything of ours can.
"""
