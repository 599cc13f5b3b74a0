"""`python -m tests.support.forked.supervisor FOLDER`: a supervisor that forks its template of itself; what it sees."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from pathlib import Path

import psutil

from deploy.supervisor.processes import ChildProcesses, marked_processes
from deploy.supervisor.template import blanks, link
from deploy.supervisor.template.blanks import blank_processes
from deploy.supervisor.template.link import TemplateProcess

MODULE = "tests.support.forked"
DEADLINE = 60.0


async def run(folder: Path) -> dict[str, object]:
    blank_pids = {child.pid for child in psutil.Process().children()}
    children = ChildProcesses(dict(os.environ), folder)
    template = TemplateProcess("template", [MODULE], lambda: None)
    children.start_template(template, ["--some", "flag"], folder / "template.log", {})
    names: dict[str, int] = {}
    try:
        async with asyncio.timeout(DEADLINE):
            while not template.is_settled:
                await asyncio.sleep(0.01)
            for name, word in (("one", "sleep"), ("two", "raise"), ("three", "exit")):
                argv = [sys.executable, "-m", MODULE, word]
                names[name] = children.start(name, argv, folder / f"{name}.log", {"SAID": "here"}, template)
            found = dict(marked_processes(folder))
            shown, parent = psutil.Process(names["one"]), psutil.Process(found["template"].pid)
            while not (folder / "one.log").read_text():
                await asyncio.sleep(0.01)
            said: dict[str, object] = {
                "marked": sorted({"template", "one"} & set(found)),
                "argv": [word for word in shown.cmdline() if word][1:],
                "descriptors": [shown.num_fds(), parent.num_fds()],
                "template is one of them": parent.pid in blank_pids,
                "own session": os.getsid(shown.pid) == shown.pid and os.getsid(parent.pid) == parent.pid,
            }
            exits: dict[str, int | None] = {}
            while len(exits) < 2:
                exits |= {each.name: each.status for each in children.exited()}
                await asyncio.sleep(0.01)
            return {**said, "exits": exits}
    finally:
        children.kill_all()
        template.close()


if __name__ == "__main__":
    blanks.ANSWER_TIMEOUT = link.FORK_TIMEOUT = DEADLINE  # whoever takes longer on a busy machine is not given up
    with blank_processes(2):
        print(json.dumps(asyncio.run(run(Path(sys.argv[1])))))
