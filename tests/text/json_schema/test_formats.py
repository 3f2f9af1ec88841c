"""Texts of each ``format``, checked by Python's library and by the grammars of the RFCs."""

import json
import random
from itertools import islice

import pytest

from pronk.text.json_schema.formats import FORMATS, NOT_ENFORCED
from pronk.text.json_schema.relax import check, relax
from schema_corpus import FORMAT_CHECKS, matcher, matches, texts

VALUES: dict[str, tuple[list[str], list[str]]] = {
    "date": (
        ["2024-02-29", "2000-02-29", "2023-12-31", "0001-01-01"],
        ["2023-02-29", "1900-02-29", "2024-02-30", "2024-04-31", "2024-13-01", "2024-00-01", "2024-1-1", "0000-01-01"],
    ),
    "time": (
        ["00:00:00Z", "23:59:59.123+23:59", "23:59:60Z", "15:59:60-08:00", "00:29:60+00:30", "10:00:00z"],
        ["24:00:00Z", "10:00:00", "10:60:00Z", "22:59:60Z", "23:59:60+01:00", "10:00:00+24:00", "10:00Z"],
    ),
    "date-time": (
        ["2024-02-29T10:00:00Z", "1998-12-31T23:59:60Z", "2024-01-01t00:00:00.5-00:00"],
        ["2023-02-29T10:00:00Z", "2024-01-01 00:00:00Z", "1998-12-31T23:58:60Z", "1998-11-30T23:59:60Z", "2024-01-01"],
    ),
    "duration": (["P1Y2M3D", "PT1H", "P4W", "P1DT2H"], ["P", "PT", "P1DT", "1D", "P1Y4W", "P1H"]),
    "email": (
        ["a@b.c", "a.b+c@x-y.org", '"a b"@c.d', "a@[127.0.0.1]", "a@[IPv6:::1]"],
        ["a", "a@", "@b", ".a@b.c", "a..b@c.d", "a@-b.c", f"{'a' * 65}@b.c", "a@[300.0.0.1]", f"a@{'b' * 64}.c"],
    ),
    "hostname": (["a", "a-b.c1", "1.2.3"], ["", "-a", "a-", "a..b", f"{'a' * 64}", ".".join(["a" * 60] * 5), "a_b"]),
    "ipv4": (["0.0.0.0", "255.255.255.255"], ["256.0.0.1", "1.2.3", "01.2.3.4", "1.2.3.4.5"]),
    "ipv6": (
        ["::", "::1", "1::", "1:2:3:4:5:6:7:8", "::ffff:1.2.3.4", "1:2:3:4:5:6:7::", "1:2:3:4:5:6:1.2.3.4",
         "a::b:1.2.3.4"],
        [":", "1::2::3", "1:2:3:4:5:6:7", "12345::", "1:2:3:4:5:6:7:8:9", "::1%eth0", "1:2:3:4:5:6:7:1.2.3.4"],
    ),
    "uuid": (["123e4567-e89b-12d3-a456-426614174000"], ["123e4567e89b12d3a456426614174000", "g" * 36]),
    "uri": (
        ["http://a.b/c?d=e#f", "urn:a:b", "mailto:a@b.c", "http://[::1]:80/", "a://u:p@h", "file:///x"],
        ["//a.b", "a", "http://a b", "http://[::1", "1a:b", "a:%zz", "a:b#c#d", "http://[1:2]/", 'a:"'],
    ),
    "uri-reference": (["", "/a", "a/b", "//x", "#f", "?q", "http://a"], ["a b", "\\a", "%", "a^b"]),
    "json-pointer": (["", "/a/b", "/~0~1", "/"], ["a", "/~", "/~2"]),
    "relative-json-pointer": (["0", "1/a", "2#"], ["", "/a", "01/a", "1a"]),
}  # fmt: skip


def test_all_formats_are_tested() -> None:
    assert {*VALUES} == {*FORMATS}
    assert NOT_ENFORCED.isdisjoint(FORMATS)


@pytest.mark.parametrize("name", VALUES)
def test_values_of_formats(name: str) -> None:
    follower = matcher(relax({"type": "string", "format": name}).schema)
    good, bad = VALUES[name]
    assert [text for text in good if not matches(follower, text)] == []
    assert [text for text in bad if matches(follower, text)] == []


@pytest.mark.few(4)
@pytest.mark.parametrize("name", FORMAT_CHECKS)
def test_random_texts_of_formats_are_valid(name: str) -> None:
    schema = relax({"type": "string", "format": name}).schema
    found = [
        json.loads(text)
        for text in islice(texts(schema, random.Random(3), longest=90), 200)
        if text
    ]
    assert len(found) > 100
    assert [text for text in found if not FORMAT_CHECKS[name](text)] == []


@pytest.mark.parametrize("name", VALUES)
def test_formats_beside_other_keywords(name: str) -> None:
    """A format applies to strings only, and together with a pattern and a length."""
    good, _ = VALUES[name]
    longest = max(good, key=len)
    schema = {"format": name, "pattern": "", "minLength": len(longest), "type": ["string", "null"]}
    relaxed = relax(schema)
    assert not relaxed.dropped
    follower = matcher(relaxed.schema)
    assert matches(follower, longest)
    assert matches(follower, None)
    assert not any(matches(follower, text) for text in good if len(text) < len(longest))


@pytest.mark.parametrize("name", sorted(NOT_ENFORCED))
def test_formats_of_the_standard_that_are_not_enforced(name: str) -> None:
    """They are annotations by the standard, so only tools report them."""
    assert relax({"format": name}).dropped == ("format",)
    assert check({"format": name}) == check({})
