"""README.md alone leads six kinds of users to their goals; ``tools/six_users.py`` is the list."""

import sys

import pytest

from tools import six_users


@pytest.mark.numpy_only
def test_every_block_of_readme_is_copied_by_a_user():
    page = six_users.README.read_text(encoding="utf-8")
    blocks = {
        (title, number)
        for title, below in six_users.sections(page).items()
        for number in range(len(below))
    }
    copied = {
        (title, number)
        for user in six_users.USERS.values()
        for title, numbers in user.blocks
        for number in numbers
    }
    assert blocks == copied
    assert {user.backend for user in six_users.USERS.values()} == {
        "tensorflow",
        "jax",
        "torch",
    }


@pytest.mark.numpy_only
def test_a_goal_that_is_missed_is_noticed(tmp_path, monkeypatch):
    page = tmp_path / "page.md"
    page.write_text("## A\n\n```python\nx = 1\n```\n\n```python\nx = 2\n```\n")
    monkeypatch.setattr(six_users, "README", page)
    for number, is_reached in ((0, False), (1, True)):
        user = six_users.User("two", (("A", (number,)),), "assert x == 2")
        assert six_users.reaches_goal(user, sys.executable) is is_reached


@pytest.mark.slow
@pytest.mark.tensorflow_only
@pytest.mark.parametrize("name", six_users.USERS)
def test_users_reach_their_goals(name):
    assert six_users.reaches_goal(six_users.USERS[name], sys.executable)
