"""What we take from libraries although it is not promised: each name, and what we count on of it."""

from __future__ import annotations

import asyncio
import inspect
import sys
from pathlib import Path

import filelock
import httpx
import huggingface_hub
from huggingface_hub import constants, file_download
from huggingface_hub._tree_cache import TreeCacheEntry, read_tree_cache, write_tree_cache
from huggingface_hub.utils import _fixes, _http

from entrypoint.weights import cache

COMMIT = "c" * 40


def test_the_clients_listing_is_kept_where_we_read_it(tmp_path: Path) -> None:
    entry = TreeCacheEntry(size=3, blob_id="1" * 40, lfs_sha256="2" * 64, lfs_size=3, xet_hash=None)
    write_tree_cache(str(tmp_path), COMMIT, {"a": entry})
    assert read_tree_cache(str(tmp_path), COMMIT) == {"a": entry}
    found = cache.tree(tmp_path, COMMIT)
    assert found is not None and found.entries["a"].digest == "2" * 64 and found.closed


def test_the_clients_branch_file_is_where_we_read_it(tmp_path: Path) -> None:
    file_download._cache_commit_hash_for_specific_revision(str(tmp_path), "main", COMMIT)
    assert cache.commit_of(tmp_path, "main") == COMMIT


def test_the_clients_lock_is_the_one_that_we_take(tmp_path: Path) -> None:
    assert _fixes.FileLock is filelock.FileLock
    path = tmp_path / "a.lock"
    with _fixes.WeakFileLock(path), cache.locked(path, 0.0) as mine:
        assert not mine
    with cache.locked(path, 0.0) as mine:
        assert mine


def test_the_clients_request_hook_takes_a_request_and_its_chunk_size_is_read_at_each_download() -> None:
    request = httpx.Request("GET", "http://127.0.0.1/")
    _http.hf_request_event_hook(request)
    assert "constants.DOWNLOAD_CHUNK_SIZE" in inspect.getsource(file_download.http_get)
    assert isinstance(constants.DOWNLOAD_CHUNK_SIZE, int)


def test_a_header_on_the_hub_is_parsed_into_names_types_shapes_and_places() -> None:
    info = huggingface_hub.utils.TensorInfo  # type: ignore[attr-defined]
    assert {"dtype", "shape", "data_offsets"} <= set(info.__dataclass_fields__)
    assert huggingface_hub.errors.SafetensorsParsingError.__name__ == "SafetensorsParsingError"


async def test_a_child_process_has_a_transport_that_can_be_closed() -> None:
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", "", stdout=asyncio.subprocess.PIPE)
    await process.communicate()
    process._transport.close()  # type: ignore[attr-defined]
