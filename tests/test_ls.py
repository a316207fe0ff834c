"""``tieredkv ls``, and the trees that it draws."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import caches
import pytest
import tiny
from caches import MODEL

from tieredkv import SaltedPrompt, TieredPromptCache, keys
from tieredkv.cli import main
from tieredkv.codec import PlaneCodec
from tieredkv.core import Namespace
from tieredkv.tiers.cold import ColdTier
from tieredkv.tiers.tree import SORTS, Tree, grow

STEM = [*range(8)]


def opened(folder: Path) -> TieredPromptCache:
    return TieredPromptCache(folder, block_tokens=4)


def use(folder: Path, tokens: Sequence[int], model: Any = MODEL) -> None:
    """A request, which is written down by the end at the latest."""
    with opened(folder) as cache:
        assert cache.fetch_nearest_cache(model, tokens)[0] is not None


def trees(folder: Path, sort: str = "used") -> list[Tree]:
    with opened(folder) as cache:
        found = cache._store.cold.consult(lambda rows: grow(rows, lambda _: True, sort))
    assert found is not None
    return found


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Two prompts that share two blocks, one that is used again and again, and another model's."""
    with opened(tmp_path) as cache:
        for tokens in ([*STEM, *range(20, 40)], [*STEM, 50, 51], [70, 71, 72]):
            cache.insert_cache(MODEL, tokens, caches.make(tokens))
        secret = SaltedPrompt([97, 98, 99, 100], b"secret")
        cache.insert_cache(("other", None, None), secret, caches.make(secret))
    for _ in range(3):
        use(tmp_path, [*STEM, 50, 51, 52])
    return tmp_path


def listed(folder: Path, capsys: pytest.CaptureFixture[str], *flags: str) -> str:
    assert main(["ls", "--dir", str(folder), *flags]) == 0
    return capsys.readouterr().out


def models(folder: Path, capsys: pytest.CaptureFixture[str], *flags: str) -> list[Any]:
    return json.loads(listed(folder, capsys, "--json", *flags))["models"]


def test_runs_without_a_branch_are_one_node(folder: Path) -> None:
    """Of a thousand blocks people want to see the few places where prompts part."""
    tree = next(tree for tree in trees(folder) if tree.name == "model")
    found = {(n.level, n.tokens, n.prefix_tokens, n.blocks) for n in tree.nodes}
    assert found == {(0, 8, 8, 2), (1, 20, 28, 5), (1, 2, 10, 1), (0, 3, 3, 1)}
    assert tree.blocks == sum(node.blocks for node in tree.nodes)
    assert tree.blob_bytes == sum(node.blob_bytes for node in tree.nodes)


def test_a_node_counts_what_is_below_it(folder: Path) -> None:
    """What a shared prefix is worth shows in the prompts that go on from it."""
    tree = next(tree for tree in trees(folder) if tree.name == "model")
    stem = next(node for node in tree.nodes if node.tokens == 8)
    below = [node for node in tree.nodes if node.parent == stem.id]
    assert len(below) == stem.n_children == 2
    assert stem.uses == 3
    assert stem.last_use == max(node.last_use for node in below)
    assert stem.freed_bytes > sum(node.freed_bytes for node in below)
    assert below[0].prefix_bytes == stem.blob_bytes + below[0].blob_bytes


def test_state_counts_with_the_block_that_it_hangs_on(tmp_path: Path) -> None:
    """A snapshot is no prompt of its own, and no place where prompts part."""
    with opened(tmp_path) as cache:
        for n in (8, 16):
            cache.insert_cache(MODEL, [*range(n)], caches.make_hybrid([*range(n)]))
    (node,) = trees(tmp_path)[0].nodes
    assert (node.tokens, node.blocks, node.n_snapshots) == (16, 4, 2)


@pytest.mark.parametrize(("sort", "first"), [("used", 3), ("size", 8), ("hits", 8)])
def test_branches_come_in_the_order_that_is_asked_for(
    tmp_path: Path, sort: str, first: int
) -> None:
    """With --limit the others are not even shown."""
    with opened(tmp_path) as cache:
        for tokens in (STEM, [70, 71, 72]):
            cache.insert_cache(MODEL, tokens, caches.make(tokens))
    for tokens in ([*STEM, 50], [*STEM, 50], [70, 71, 72, 73]):
        use(tmp_path, tokens)
    assert sort in SORTS
    assert trees(tmp_path, sort)[0].nodes[0].tokens == first


def test_the_most_used_prefixes(folder: Path) -> None:
    """The page shows these first; nothing that nobody has used again, and no tenant's tokens."""
    with opened(folder) as cache:
        best = cache.prefixes(10)
        assert cache.prefixes(1) == best[:1]
    use(folder, SaltedPrompt([97, 98, 99, 100, 101], b"secret"), ("other", None, None))
    with opened(folder) as cache:
        salted = [prefix for prefix in cache.prefixes(10) if prefix.salted]
    assert [(p.tokens, p.uses, p.model) for p in best] == [(8, 3, "model"), (10, 3, "model")]
    assert best[0].start + best[0].end == tuple(STEM)
    assert [(p.start, p.end) for p in salted] == [((), ())]


def test_what_stays_and_what_goes_by_itself(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A pin keeps all that leads to it; what is kept for a time says for how long."""
    with opened(folder) as cache:
        cache.pin(MODEL, [*STEM, 50, 51])
        brief = SaltedPrompt([80, 81, 82], ttl=7300)
        cache.insert_cache(MODEL, brief, caches.make(brief))
    (model,) = models(folder, capsys, "--model", "model")
    found = {n["prefix_tokens"]: (n["pinned"], n["expires"]) for n in model["prefixes"][:4]}
    assert found[8] == found[10] == (True, None)
    assert found[28] == (False, None)
    assert "expires in 2h" in listed(folder, capsys, "--model", "model")
    assert "pinned" in listed(folder, capsys, "--model", "model")
    with opened(folder) as cache:
        assert {p.tokens: p.pinned for p in cache.prefixes(9)} == {8: True, 10: True}


def test_a_store_without_a_disk_has_no_prefixes() -> None:
    """A memory-only server has the page, too."""
    with opened(None) as cache:  # type: ignore[arg-type]
        assert cache.prefixes(3) == []


def test_the_tree_is_drawn(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What is below what has to be seen at a glance, with size, age and hits."""
    out = listed(folder, capsys, "--model", "model")
    rows = [line for line in out.splitlines() if "tokens" in line]
    assert sum(line.startswith(("├─ ", "└─ ")) for line in rows) == 2
    assert sum(line[3:].startswith(("├─ ", "└─ ")) for line in rows) == 2
    assert "+20 tokens" in out
    assert "just now" in out
    assert "3 hits" in out
    assert "other" not in out


def test_what_is_left_out_is_said(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A list that ends early must not look complete."""
    out = listed(folder, capsys, "--model", "model", "--limit", "1")
    assert out.count("… 1 more") == 2
    out = listed(folder, capsys, "--model", "model", "--depth", "1")
    assert "… 2 more" in out
    assert "+" not in out
    (model,) = models(folder, capsys, "--model", "model", "--depth", "1")
    assert (len(model["prefixes"]), model["left_out"]) == (2, 2)


def test_a_long_conversation_is_no_trouble(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A tree of more levels than Python has frames."""
    chain = caches.chain([*range(1100)], block_tokens=1)
    trunk = caches.blocks(chain, width=1)
    side = (5000).to_bytes(8, "little")
    branches = [
        replace(b, parent=b.key, key=keys.block_key(b.key, side), tokens=side) for b in trunk
    ]
    tier = ColdTier(tmp_path, 64 << 20, PlaneCodec())
    tier.register(Namespace("model", block_tokens=1))
    assert tier.put([*trunk, *branches]) == 2200
    tier.close()
    (model,) = models(tmp_path, capsys)
    assert max(node["level"] for node in model["prefixes"]) > 1000
    assert "└─" in listed(tmp_path, capsys, "--depth", "2000", "--limit", "5000")


def test_models_and_nothing(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A pattern that nothing fits must not print the others, or an error."""
    assert [m["name"] for m in models(folder, capsys, "--model", "oth*")] == ["other"]
    assert "nothing is stored of a model like nix" in listed(folder, capsys, "--model", "nix")
    assert main(["ls", "--dir", str(tmp_path / "absent")]) == 1


class TestText:
    """With a tokenizer."""

    @pytest.fixture
    def model(self, tmp_path: Path) -> Path:
        return tiny.save(tmp_path / "model")

    @pytest.fixture
    def folder(self, tmp_path: Path, model: Path) -> Path:
        """A prompt with an escape sequence that clears the screen, and a tenant's."""
        words = tiny.tokenizer()
        with TieredPromptCache(tmp_path / "cold") as cache:
            for text, salt in (("once upon\n a time \x1b[2J end", b""), ("my secret", b"salt")):
                tokens = SaltedPrompt(words.encode(text).ids, salt)
                cache.insert_cache((str(model), None, None), tokens, caches.make(tokens))
        return tmp_path / "cold"

    @pytest.mark.parametrize("own", [True, False])
    def test_text_is_shown(
        self, folder: Path, model: Path, own: bool, capsys: pytest.CaptureFixture[str]
    ) -> None:
        """Ids say nothing to people."""
        out = listed(folder, capsys, *(["--text"] if own else ["--tokenizer", str(model)]))
        assert "once upon a time" in out

    def test_text_can_do_nothing_to_a_terminal(
        self, folder: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        """Prompts are other people's; what they send must not run in an operator's terminal."""
        out = listed(folder, capsys, "--text", "--salted")
        assert "\x1b" not in out
        assert "[2J" in out

    def test_text_under_a_salt_is_shown_on_demand(
        self, folder: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        """Tenants are kept apart from who only looks for the largest prompt."""
        assert "my secret" not in listed(folder, capsys, "--text")
        assert "my secret" not in json.dumps(models(folder, capsys, "--text"))
        assert "my secret" in listed(folder, capsys, "--text", "--salted")

    def test_without_a_tokenizer(
        self, folder: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
    ) -> None:
        """A wrong path is said at once; a model that has left leaves its prompts without text."""
        assert main(["ls", "--dir", str(folder), "--tokenizer", str(tmp_path / "nix")]) == 1
        assert "--tokenizer" in capsys.readouterr().err


def test_it_starts_without_mlx(folder: Path) -> None:
    """Seconds of start-up for a list of milliseconds."""
    program = (
        "import sys; from tieredkv.cli import main; main(sys.argv[1:]);"
        "assert not {'mlx.core', 'mlx_lm', 'transformers'} & sys.modules.keys()"
    )
    subprocess.run(
        [sys.executable, "-c", program, "ls", "--dir", str(folder)], check=True, capture_output=True
    )


def test_a_reader_that_has_seen_enough(folder: Path) -> None:
    """``tieredkv ls | head`` must not end in a traceback."""
    program = f"{sys.executable} -m tieredkv ls --dir {folder} | true"
    done = subprocess.run(["sh", "-c", program], capture_output=True, text=True)
    assert done.stderr == ""
