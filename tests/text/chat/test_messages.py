"""``check_messages``: malformed messages give an error of one line; text parts are joined."""

from typing import Any

import pytest

from pronk.base.errors import PromptError
from pronk.text.chat.messages import ROLES, check_messages, join_parts

USER = {"role": "user", "content": "Hi"}
CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}


def parts(*given: Any) -> list[Any]:
    return [{"role": "user", "content": list(given)}]


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        (None, "messages: expected a list of objects with 'role' and 'content', found None"),
        ("Hi", "messages: expected a list of objects with 'role' and 'content', found str 'Hi'"),
        (
            b"Hi",
            "messages: expected a list of objects with 'role' and 'content', found bytes b'Hi'",
        ),
        (
            USER,
            (
                "messages: expected a list of objects with 'role' and 'content', found dict "
                "{'role': "
                "'user', "
            ),
        ),
        (5, "messages: expected a list of objects with 'role' and 'content', found int 5"),
        ([], "messages: expected at least one message with 'role' and 'content', found none"),
        ([None], "messages[0]: expected an object with 'role' and 'content', found None"),
        (["Hi"], "messages[0]: expected an object with 'role' and 'content', found str 'Hi'"),
        (
            [USER, {"role": "user"}],
            "messages[1]: expected a string or a list of parts for 'content', found no such key",
        ),
        ([{"content": "Hi"}], "messages[0]: expected a string for 'role', found no such key"),
        (
            [{"role": None, "content": "Hi"}],
            "messages[0]: expected a string for 'role', found None",
        ),
        ([{"role": 1, "content": "x"}], "messages[0]: expected a string for 'role', found int 1"),
        (
            [{"role": "user", "content": None}],
            "messages[0]: expected a string or a list of parts for 'content', found None",
        ),
        (
            [{"role": "assistant", "content": None}],
            "messages[0]: expected a string or a list of parts for 'content'",
        ),
        (
            [{"role": "user", "content": None, "tool_calls": [CALL]}],
            (
                "messages[0]: expected tool_calls with the role 'assistant' only, "
                "found the role 'user'"
            ),
        ),
        (
            [USER, {"role": "assistant", "content": "a", "tool_call_id": "1"}],
            (
                "messages[1]: expected tool_call_id with the role 'tool' only, "
                "found the role 'assistant'"
            ),
        ),
        (
            [{"role": "usr", "content": "Hi"}],
            (
                f"messages[0]: expected a role of {', '.join(ROLES)}, found 'usr'; "
                "did you mean 'user'?"
            ),
        ),
        (
            [{"role": "User", "content": "Hi"}],
            (
                f"messages[0]: expected a role of {', '.join(ROLES)}, found 'User'; "
                "did you mean 'user'?"
            ),
        ),
        (
            [{"role": "xyz\n", "content": "Hi"}],
            (
                "messages[0]: expected a role of system, developer, user, assistant, tool, "
                "found 'xyz\\n'"
            ),
        ),
        (
            [{"role": "user", "content": 5}],
            "messages[0]: expected a string or a list of parts for 'content', found int 5",
        ),
        (
            parts(
                {"type": "text", "text": "What is it?"},
                {"type": "image_url", "image_url": {"url": "…"}},
            ),
            (
                "messages[0], part 1: expected the type 'text', found 'image_url'; the model reads "
                "text alone, so leave it"
            ),
        ),
        (
            parts({"type": "input_audio"}),
            "messages[0], part 0: expected the type 'text', found 'input_audio'",
        ),
        (
            parts("Hi"),
            (
                "messages[0], part 0: expected an object such as {'type': 'text', 'text': '…'}, "
                "found str 'Hi'"
            ),
        ),
        (
            parts({"text": "Hi"}),
            "messages[0], part 0: expected an object such as {'type': 'text', 'text': '…'}, found",
        ),
        (
            parts({"type": "text"}),
            "messages[0], part 0: expected a string for 'text', found no such key",
        ),
        (
            parts({"type": "text", "text": ["a"]}),
            "messages[0], part 0: expected a string for 'text', found list ['a']",
        ),
    ],
)
def test_malformed_messages(messages: Any, message: str) -> None:
    with pytest.raises(PromptError) as caught:
        check_messages(messages)
    assert str(caught.value).startswith(message)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("role", "meant"),
    [
        ("function", "tool"), ("ipython", "tool"), ("observation", "tool"), ("tools", "tool"), ("model", "assistant"),
        ("assistent", "assistant"), ("bot", "assistant"), ("human", "user"), ("sytem", "system"),
    ],
)  # fmt: skip
def test_close_roles_are_named(role: str, meant: str) -> None:
    with pytest.raises(PromptError, match=rf"found '{role}'; did you mean '{meant}'\?$"):
        check_messages([{"role": role, "content": "Hi"}])


@pytest.mark.parametrize("role", ROLES)
def test_templates_get_the_role_system_for_developer(role: str) -> None:
    (message,) = check_messages([{"role": role, "content": "Hi"}])
    assert message == {"role": "system" if role == "developer" else role, "content": "Hi"}


def test_values_of_several_lines_are_shown_in_one_line() -> None:
    class Table:
        def __repr__(self) -> str:
            return "a\n  b\n" * 50

    with pytest.raises(PromptError, match=r"found Table a b a b a [ab ]+$"):
        check_messages([Table()])


def test_messages_are_copied_with_all_their_keys() -> None:
    given = [
        USER,
        {"role": "assistant", "content": None, "tool_calls": [CALL]},
        {"role": "assistant", "tool_calls": [1]},
    ]
    checked = check_messages(tuple(given))
    # templates expect the arguments as an object
    read = {**CALL, "function": {"name": "f", "arguments": {}}}
    assert checked == [given[0], {**given[1], "tool_calls": [read]}, given[2]]
    assert CALL["function"] == {"name": "f", "arguments": "{}"}
    assert all(a is not b for a, b in zip(checked, given, strict=True))


def test_parts_are_joined_as_lines() -> None:
    (message,) = check_messages(
        parts({"type": "text", "text": "one"}, {"type": "text", "text": "two", "more": 1})
    )
    assert message["content"] == [
        {"type": "text", "text": "one"},
        {"type": "text", "text": "two", "more": 1},
    ]
    assert join_parts(message) == {"role": "user", "content": "one\ntwo"}
    assert join_parts(USER) == USER
    assert join_parts({"role": "assistant", "tool_calls": [CALL]}) == {
        "role": "assistant",
        "tool_calls": [CALL],
    }
