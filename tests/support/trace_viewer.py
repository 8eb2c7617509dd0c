"""What a viewer asks of a trace."""

from __future__ import annotations


def assert_a_viewer_shows_all(events: list[dict]) -> None:
    """As Perfetto wants it (asked of its trace processor 55.3, which files thread 0 with another thread, and drops the
    second of two complete events of a thread that overlap): every pair of spans of a thread is apart or nested, a
    thread has a positive number that no other process uses, and a name."""
    spans: dict[tuple[int, int], list[tuple[int, int]]] = {}
    for event in events:
        if event["ph"] == "X":
            assert (
                isinstance(event["ts"], int) and isinstance(event["dur"], int) and event["dur"] >= 0
            )
            spans.setdefault((event["pid"], event["tid"]), []).append(
                (event["ts"], event["ts"] + event["dur"])
            )
    for of_track in spans.values():
        for i, (a, b) in enumerate(of_track):
            for c, d in of_track[i + 1 :]:
                assert b <= c or d <= a or (a <= c and d <= b), (a, b, c, d)  # a parent comes first
    threads = [tid for _, tid in spans]
    assert len(set(threads)) == len(threads) and min(threads) > 0
    assert spans.keys() == {(e["pid"], e["tid"]) for e in events if e["name"] == "thread_name"}
