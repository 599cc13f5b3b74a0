"""`baton logs`: merged, filtered, and readable when what was logged is no JSON."""

from __future__ import annotations

from pathlib import Path

from deploy.cli.logs import LogFollower, LogQuery, for_people, merged
from deploy.supervisor import log_files
from deploy.supervisor.log_files import LogFolder

EVERYTHING = LogQuery(service=None, request=None, lines=None)


def line(second: int, instance: str, event: str, request: str | None = None) -> str:
    about = f',"request":"{request}"' if request else ""
    service = instance.rpartition("-")[0]
    return (
        f'{{"time":"2026-01-01T00:00:{second:02d}.000Z","level":"info","service":"{service}",'
        f'"instance":"{instance}","event":"{event}"{about}}}\n'
    )


def folder(tmp_path: Path) -> Path:
    (tmp_path / "gateway-1.log").write_text(
        line(1, "gateway-1", "asked", "r-1") + line(4, "gateway-1", "answered", "r-1") + line(5, "gateway-1", "idle")
    )
    (tmp_path / "tokenizer-1.log").write_text(
        line(2, "tokenizer-1", "tokenized", "r-1") + "Traceback:\n  boom\n" + line(3, "tokenizer-1", "other", "r-10")
    )
    return tmp_path


def texts(tmp_path: Path, query: LogQuery) -> list[str]:
    return [
        line.fields["event"] if line.fields else line.text
        for line in merged(log_files.log_files(folder(tmp_path)), query)
    ]


def test_lines_of_all_services_come_in_time_order_tracebacks_where_they_belong(tmp_path: Path) -> None:
    assert texts(tmp_path, EVERYTHING) == ["asked", "tokenized", "Traceback:", "  boom", "other", "answered", "idle"]


def test_a_request_is_followed_through_the_services_by_its_id(tmp_path: Path) -> None:
    assert texts(tmp_path, EVERYTHING._replace(request="r-1")) == ["asked", "tokenized", "answered"]


def test_the_choices_of_a_request_are_found_by_what_their_ids_share(tmp_path: Path) -> None:
    assert texts(tmp_path, EVERYTHING._replace(request="r")) == ["asked", "tokenized", "other", "answered"]


def test_a_request_that_was_refused_is_found_by_the_clients_id_alone(tmp_path: Path) -> None:
    paths = log_files.log_files(folder(tmp_path))
    with (tmp_path / "gateway-1.log").open("a") as file:
        file.write(line(6, "gateway-1", "audit").replace("}", ',"status":400,"client_request":"mine"}'))
        file.write(line(7, "gateway-1", "audit", "r-1").replace("}", ',"client_request":"mine"}'))
    found = [each.fields["event"] for each in merged(paths, EVERYTHING._replace(request="mine")) if each.fields]
    assert found == ["asked", "tokenized", "answered", "audit", "audit"]


def test_a_service_has_all_its_instances_and_an_instance_has_itself(tmp_path: Path) -> None:
    assert texts(tmp_path, EVERYTHING._replace(service="gateway")) == ["asked", "answered", "idle"]
    assert texts(tmp_path, EVERYTHING._replace(service="tokenizer-1"))[0] == "tokenized"
    assert texts(tmp_path, EVERYTHING._replace(service="tokenizer-2")) == []


def test_only_the_last_lines_where_asked(tmp_path: Path) -> None:
    assert texts(tmp_path, EVERYTHING._replace(lines=2)) == ["answered", "idle"]


def test_a_line_for_people_has_time_instance_event_and_the_rest(tmp_path: Path) -> None:
    first = next(iter(merged(log_files.log_files(folder(tmp_path)), EVERYTHING)))
    assert for_people(first, coloured=False).split() == ["00:00:01.000", "gateway-1", "asked", "request=r-1"]


def test_following_gives_new_lines_whole_and_new_files_from_their_beginning(tmp_path: Path) -> None:
    tails = LogFollower(folder(tmp_path))
    tails.go_to_end()
    whole = line(6, "gateway-1", "next")
    with (tmp_path / "gateway-1.log").open("a") as file:
        file.write(whole[:20])
        file.flush()
        assert list(tails.new_lines()) == []
        file.write(whole[20:])
    (tmp_path / "tokenizer-2.log").write_text(line(7, "tokenizer-2", "born"))
    assert [line.fields["event"] for line in tails.new_lines() if line.fields] == ["next", "born"]
    (tmp_path / "gateway-1.log").write_text(line(8, "gateway-1", "after the rotation"))
    assert [line.fields["event"] for line in tails.new_lines() if line.fields] == ["after the rotation"]


def test_a_log_that_grew_too_large_is_kept_once_and_emptied_under_its_writer(tmp_path: Path) -> None:
    logs = LogFolder(tmp_path)
    logs.begin_run()
    with logs.of("worker-1").open("ab", buffering=0) as writer:
        writer.write(b"x" * (log_files.MAX_LOG_BYTES + 1))
        logs.bound()
        writer.write(b"after\n")
    assert logs.of("worker-1").read_bytes() == b"after\n"
    assert (logs.folder / "worker-1.log.1").stat().st_size == log_files.MAX_LOG_BYTES + 1


def test_a_new_run_keeps_the_logs_of_the_one_before(tmp_path: Path) -> None:
    logs = LogFolder(tmp_path)
    for run in ("first", "second"):
        logs.begin_run()
        logs.of("gateway-1").write_text(run)
    assert (tmp_path / "logs.previous" / "gateway-1.log").read_text() == "first"
    assert logs.of("gateway-1").read_text() == "second"
