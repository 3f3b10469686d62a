"""Reported failures of hub caches and downloads, each with the test that shows it cannot happen here, or the reason."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

HERE = Path(__file__).parent

# case: test that shows it, or "reason: ..." where there is nothing to show.
CASES = {
    "w01 right size, wrong bytes": "test_a_flipped_byte_on_the_way_is_seen_and_fetched_again",
    "w01 the same through Xet": "test_xet_wrong_bytes_and_xet_errors",
    "w03 index names an absent shard": "test_what_each_check_sees",
    "w07 cache filled by commit, no refs": "test_a_foreign_cache_without_trees_or_refs_is_proven_by_its_names",
    "w08 refs rewritten under a reader": "test_two_processes_on_one_cache",
    "w09 flock that locks nothing": "test_a_file_system_without_locks_means_one_worker_and_a_warning",
    "w12 waits for ever on a lock": "test_a_lock_that_another_process_keeps_is_named",
    "w13 no flock": "test_a_file_system_without_locks_means_one_worker_and_a_warning",
    "w14 local_dir locks on shared storage": "reason: the cache layout is used, never local_dir; workers are a setting",
    "w15 left-over .incomplete": "test_orphans_go_and_files_at_work_stay",
    "w17 Xet freezes": "test_a_stalled_xet_falls_back_to_plain_http",
    "w18 Xet hangs near the end": "test_a_stalled_xet_falls_back_to_plain_http",
    "w19 container stays starting for ever": "test_a_stall_that_nothing_ends_is_refused",
    "w21 429 at every worker's start": "test_clean_fetch_then_a_boot_without_any_request",
    "w22 429 at the container's start": "test_a_rate_limit_for_an_hour_is_refused_with_its_time",
    "w24 local path with HF_HUB_OFFLINE": "test_offline_makes_no_request_and_names_the_files",
    "w25 repository id instead of a path": "test_clean_fetch_then_a_boot_without_any_request",
    "w26 HF_HUB_OFFLINE not respected": "test_values_that_the_client_would_misread_are_refused",
    "w28 read-only cache": "test_a_read_only_cache_serves_when_complete_and_says_so_when_not",
    "w31 permission denied": "test_the_cache_of_another_user",
    "w33 listing unreadable for another uid": "test_the_cache_of_another_user",
    "w34 token makes the cache unreadable": "test_a_gated_model_comes_with_the_token_and_the_token_stays_at_the_hub",
    "w35 token file with a line end": "test_tokens_are_cleaned_and_found_where_the_client_looks",
    "w37 401 although a token is set": "test_each_refusal_is_one_line_with_its_code",
    "w40 payloads outside the repository's folder": "test_xet_wrong_bytes_and_xet_errors",
    "w41 link to outside the mount": "test_a_link_to_outside_the_mount_is_named",
    "w44 truncated shard": "test_what_each_check_sees",
    "w45 published file is bad": "test_a_file_that_was_published_bad_is_said_to_be",
    "w47 truncated tokenizer": "test_what_each_check_sees",
    "w49 vectored writes on NFS": "test_what_the_child_gets",
    "w52 HEAD time-out, '30s'": "test_values_that_the_client_would_misread_are_refused",
    "w53 cache in the container's layer": "test_a_big_download_into_a_container_layer_is_warned_of",
    "w54 JIT caches under the weights": "reason: compiled kernels lie in RELAUNCH_CACHE_DIR, weights in the hub cache",
}


@pytest.mark.parametrize("case", CASES)
def test_every_case_has_its_test_or_its_reason(case: str) -> None:
    answer = CASES[case]
    if answer.startswith("reason: "):
        assert len(answer) > 30
        return
    found = [path for path in HERE.glob("test_*.py") if re.search(rf"^(async )?def {answer}\(", path.read_text(), re.M)]
    assert len(found) == 1
