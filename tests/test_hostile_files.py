"""Files and strings of strangers: each ends in one short line that names the file, in no time.

None takes memory beyond its own size, none writes elsewhere, none reaches the terminal as a code.
"""

from __future__ import annotations

import json
import os
import tracemalloc

import flax.linen as nn
import jax
import jax.numpy as jnp
import pytest

import jaxmp
from jaxmp import cli, numerics
from jaxmp._core.printable import printable, shown
from jaxmp._tools.files import RunCache
from jaxmp._tools.lock.check import check
from jaxmp._tools.lock.file import read, text_of
from jaxmp._tools.lock.lock import Lock
from jaxmp._tools.validate.run import Run

from support import case

ESCAPE = "\x1b[31m\u202e\u200b\x07"


def bounded(call, error=ValueError):
    """The message of the error that a call raises: in one line or a few, and not much memory."""
    tracemalloc.start()
    try:
        with pytest.raises(error) as caught:
            call()
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    message = str(caught.value)
    assert type(caught.value).__name__ not in (
        "JSONDecodeError",
        "UnicodeDecodeError",
        "TOMLDecodeError",
    )
    assert len(message) < 1500, len(message)
    assert message == printable(message)
    assert peak < 64 * 2**20, f"{peak / 2**20:.0f} MiB"
    return message


# Locks.

HEAD = b"precision_lock = 1\n"
LOCKS = {
    "a range of a trillion layers": (
        HEAD + b'[module."a{0-999999999999}"]\n',
        "line 2: .* more than",
    ),
    "a range of many digits": (HEAD + b'[module."a{0-%s}"]\n' % (b"9" * 5000), "is not a range of"),
    "products of ranges": (HEAD + b'[module."%s"]\n' % (b"{0-9}" * 60), "more than 10,000 modules"),
    "many patterns": (
        HEAD + b"".join(b'[module."%d_{0-5000}"]\n' % i for i in range(3)),
        "line 3: .* more than 4,999 modules",
    ),
    "a range backwards": (HEAD + b'[module."a{5-3}"]\n', "line 2: .* ends before it starts"),
    "a range of three": (HEAD + b'[module."a{1-2-3}"]\n', "'1-2-3' is not a range"),
    "a range without an end": (HEAD + b'[module."a{1,}"]\n', "'' is not a range"),
    "a long name": (HEAD + b'[module."%s"]\n' % (b"a" * 100_000), "more than 1,000 characters"),
    "nested arrays": (HEAD + b"loss_scaling = " + b"[" * 5000 + b"\n", "line 2 is nested too deep"),
    "nested over lines": (HEAD + b"loss_scaling = " + b"[\n" * 3_000, "is nested too deeply"),
    "nested tables": (HEAD + b"x = " + b"{a=" * 5000 + b"\n", "line 2 is nested too deeply"),
    "dotted keys": (HEAD + b"a." * 100_000 + b"a = 1\n", "line 2 is nested too deeply"),
    "dotted tables": (HEAD + b"[" + b"'a'." * 100_000 + b"a]\n", "line 2 is nested too deeply"),
    "a text of lines": (HEAD + b'policy = """\nx', "line 2 has a string without an end"),
    "a string without an end": (HEAD + b'[module."a]\n', "line 2 has a string without an end"),
    "half a file": (HEAD + b"[module.a]\nsaved = [", "line 3|end of document|Invalid value"),
    "two keys": (HEAD + HEAD, "Cannot overwrite a value .at line 2"),
    "not UTF-8": (HEAD + b"policy = '\xff'\n", r"line 2 is not UTF-8 \(the byte 0xff\)"),
    "UTF-16": ("precision_lock = 1\n".encode("utf-16"), "line 1 is not UTF-8"),
    "zeros": (bytes(1000), "Invalid statement .at line 1"),
    "a large file": (HEAD + b"#" * 5_000_000, "it is larger than 4 MiB"),
    "a huge number": (HEAD + b"policy = " + b"9" * 10_000 + b"\n", "number of thousands of digits"),
    "a huge hexadecimal": (
        HEAD + b"policy = 0x" + b"f" * 9_000 + b"\n",
        "an integer of 36000 bits",
    ),
    "a huge version": (b"precision_lock = 0x" + b"f" * 9_000 + b"\n", "format an integer of 36000"),
    "not a number": (HEAD + b"policy = nan\n", "in line 2: policy = nan must be a str"),
    "a count": (
        HEAD + b"[module.a]\nsaved = ['f \xc3\x97%s']\n" % (b"9" * 5000),
        "line 3: module.a",
    ),
    "escape codes": (
        HEAD + b'"\\u001b[31m" = 3\n',
        r"line 2: '\\x1b\[31m' is not a part of a lock",
    ),
    "escape codes inside": (
        HEAD + b'[module."\\u001b"]\nsaved = 3\n',
        r"module.\\x1b.saved = 3 must",
    ),
    "raw escape codes": (HEAD + b"policy = '\x1b[31m'\n", "invalid character .*line 2"),
    "a policy": (HEAD + b"policy = 'mixed_bflaot16'\n", "line 2: policy = .*did you mean"),
    "a long policy": (
        HEAD + b"policy = '%s'\n" % (b"p" * 10**6),
        "line 2: policy = .*at most 10,000",
    ),
    "of other types": (HEAD + b"[module]\na = 3\n", "line 3: module.a = 3 must be a dict"),
    "of deeper types": (HEAD + b"[module.a.b.c.d]\nx = 1\n", "in line 2: module.a.b.c = "),
}


def test_hostile_locks(tmp_path):
    file = tmp_path / "precision.lock"
    for name, (content, said) in LOCKS.items():
        file.write_bytes(content)
        with case(name), pytest.raises(ValueError, match=said):
            raise ValueError(bounded(lambda: read(file)))


def test_what_is_no_file(tmp_path):
    """A folder, a pipe that nobody writes to, a device, a link in a circle, a name that is none."""
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "circle").symlink_to("circle")
    for path, said in (
        (tmp_path, "it is a folder"),
        (tmp_path / "pipe", "not a regular file"),
        ("/dev/zero", "not a regular file"),
        (tmp_path / "circle", "symbolic links"),
        ("a\0b", "a null character"),
        (f"{tmp_path}/{'a' * 1000}", "too long"),
    ):
        with case(str(path)):
            assert said in bounded(lambda path=path: check(jnp.sin, path)(1.0))
    assert not list(tmp_path.glob("*.new"))


def test_a_byte_order_mark_is_not_damage(tmp_path):
    file = tmp_path / "precision.lock"
    check(jnp.sin, file, update=True)(1.0)
    file.write_bytes(b"\xef\xbb\xbf" + file.read_bytes().replace(b"\n", b"\r\n"))
    assert not check(jnp.sin, file)(1.0).differences


def test_a_lock_that_could_not_be_read_is_not_written():
    operations = {f"layer{i}x": {} for i in range(10_001)}
    with pytest.raises(ValueError, match="has 10,001 modules, and a lock at most 10,000"):
        text_of(Lock("", (), {}, {}, operations))


def test_a_lock_is_not_written_through_a_link(tmp_path):
    """Git keeps links: one in a pull request would let --update write to any file of the user."""
    for target, content in (("there", "mine"), ("nowhere", None)):
        other, link = tmp_path / target, tmp_path / f"{target}.lock"
        if content:
            other.write_text(content)
        link.symlink_to(other)
        for call in (
            check(jnp.sin, link, update=True),
            jaxmp.testing.assert_precision_locked(jnp.sin, link, update=True),
        ):
            message = bounded(lambda call=call: call(1.0))
            assert str(link) in message or target in message
        assert link.is_symlink()
        assert (other.read_text() if other.exists() else None) == content


def test_a_lock_is_replaced_whole_and_keeps_its_permissions(tmp_path, monkeypatch):
    file = tmp_path / "precision.lock"
    check(jnp.sin, file, update=True)(1.0)
    assert file.stat().st_mode & 0o777 == 0o666 & ~_umask(tmp_path)
    file.chmod(0o640)
    before = file.read_text()
    monkeypatch.setattr(os, "replace", None)  # `Path.replace` calls it
    with pytest.raises(TypeError):
        check(jnp.sin, file, "bfloat16", update=True)(1.0)
    assert [p.name for p in tmp_path.iterdir() if p.name != "umask"] == [file.name]
    assert file.read_text() == before
    monkeypatch.undo()
    check(jnp.sin, file, "bfloat16", update=True)(jnp.ones(3))
    assert file.read_text() != before
    assert file.stat().st_mode & 0o777 == 0o640


def _umask(folder):
    (folder / "umask").touch()
    return ~(folder / "umask").stat().st_mode & 0o777


# Finished runs.


def test_hostile_runs_are_made_again(tmp_path):
    """They are named by a warning, and never read as a run."""
    kept = RunCache("validate", tmp_path)
    run = Run("it", 0, 0, (1.0, float("nan")), (), (), (True, False), 1.0, False, ())
    good = {**vars_of(run), "losses": [1.0, float("nan")], "finite": [True, False]}
    kept.put("it", 1, good)
    [path] = tmp_path.iterdir()
    assert kept.get("it", 1, Run.from_dict).finite == run.finite

    def result(**fields):
        return json.dumps({"result": good | fields}).encode()

    for content, said in (
        (b"[" * 10**5, "nested too deeply"),
        (b"\xff", "line 1 is not UTF-8"),
        (b'{"result": %s}' % (b"9" * 5000), "thousands of digits"),
        (b'{"result": {}, "result": {}}', "the key 'result' is in it twice"),
        (result()[:-40], "it is not JSON: .* line 1"),
        (result(losses=["1"]), "losses is "),
        (result(losses=[[]]), "losses is "),
        (result(losses=3), "losses is 3"),
        (result(finite=[1, 2]), "finite is "),
        (result(grad_norms=[1.0]), "grad_norms has 1 of 2 steps"),
        (result(final=None), "final is None"),
        (result(label=ESCAPE, seed="x"), "seed is 'x'"),
        (json.dumps({"result": {ESCAPE: 1}}).encode(), r"\\x1b"),
    ):
        path.write_bytes(content)
        with (
            case(content[:40]),
            pytest.warns(UserWarning, match=rf"is damaged \(.*{said}") as caught,
        ):
            assert kept.get("it", 1, Run.from_dict) is None
        text = str(caught[0].message)
        assert text == printable(text)
        assert len(text) < 800
    path.unlink()
    path.mkdir()
    with pytest.warns(UserWarning, match="it is a folder"):
        assert kept.get("it", 1, Run.from_dict) is None
    path.rmdir()
    (tmp_path / "mine").write_text("mine")
    path.symlink_to("mine")
    with pytest.raises(ValueError, match="symbolic link"):
        kept.put("it", 1, good)
    assert (tmp_path / "mine").read_text() == "mine"


def vars_of(run):
    return {name: getattr(run, name) for name in run.__slots__}


# Policies.


def test_hostile_policies():
    long = "x" * 3_000_000
    for call in (
        lambda: jaxmp.get_policy(long),
        lambda: jaxmp.get_policy(f"p={long}"),
        lambda: jaxmp.get_policy("p=" + "x" * 9_000),
        lambda: jaxmp.get_policy("=" * 9_000),
        lambda: jaxmp.get_policy(f"mixed_bfloat16,{ESCAPE}=3"),
        lambda: jaxmp.get_policy(f"{ESCAPE}"),
        lambda: jaxmp.get_policy("mixed_bfloat16,ops=" + "a:b|" * 2000),
        lambda: jaxmp.get_policy("mixed_bfloat16,matmul=" + "e4m3," * 1500),
        lambda: jaxmp.Policy(compute_dtype=long),
        lambda: jaxmp.Policy(attention=f"fused@{long}"),
        lambda: jaxmp.Policy(matmul=long),
        lambda: jaxmp.Policy(residuals=long),
        lambda: jaxmp.Policy(ops={"exp": long}),
        lambda: jaxmp.PolicyMap({long: "float32"}, default="mixed_bfloat16"),
        lambda: jaxmp.PolicyMap({"**/" * 5000 + "a": "float32"}, default="mixed_bfloat16"),
        lambda: jaxmp.preflight(jnp.sin, target=long)(1.0),
        lambda: jaxmp.preflight(jnp.sin, target=f"tpu-v5e:{ESCAPE}")(1.0),
    ):
        bounded(call)


# What is printed.


def test_what_is_not_printable_is_escaped():
    for text, said in (
        ("a\nb", "a\nb"),
        ("ä ×→“", "ä ×→“"),
        ("\x1b[2J\r\b\x7f\x9b", r"\x1b[2J\r\x08\x7f\x9b"),
        ("\u202e\u2066\u200b\ufeff\u00a0\u2028", r"\u202e\u2066\u200b\ufeff\xa0\u2028"),
        ("\ud800\U000e0041", r"\ud800\U000e0041"),
    ):
        assert printable(text) == said
    assert shown(10**5000) == "an integer of 16610 bits"
    assert shown([10**5000]) == "a list"


def test_names_of_modules_and_locks_are_printable_in_every_report(tmp_path, capsys):
    x = jnp.ones((8, 8))

    class Net(nn.Module):
        @nn.compact
        def __call__(self, x):
            x = nn.Dense(8, name=f"a{ESCAPE}")(x).astype(jnp.float16) * jnp.float16(60000) * 2
            return nn.Dense(8, name="b")(x.astype(jnp.float32)).sum()

    net = Net()
    params = net.init(jax.random.key(0), x)
    loss = jaxmp.autocast(net.apply, "mixed_bfloat16")
    reports = [
        jaxmp.explain(net.apply, "mixed_bfloat16")(params, x),
        jaxmp.audit(loss)(params, x),
        jaxmp.diagnose(net.apply, "mixed_float16")(params, x),
        numerics.capture(net.apply)(params, x),
    ]
    path = tmp_path / "precision.lock"
    check(net.apply, path, update=True)(params, x)
    path.write_text(path.read_text().replace("\\u0007", "\\u0007\\u001b]0;title"))
    reports.append(check(net.apply, path)(params, x))
    texts = [str(r) for r in reports] + [repr(r) for r in reports]
    texts += [r.to_text(verbose=True) for r in reports if hasattr(r, "to_text")]
    texts += [str(s.site) for s in reports[3].sites.values()] + [str(o) for o in reports[2].faults]
    for text in texts:
        assert text == printable(text)
    assert sum("\\x1b[31m\\u202e" in text for text in texts) >= 8
    assert cli.main(["audit", f"{ESCAPE}:make"]) == 2
    error = capsys.readouterr().err
    assert error == printable(error)
