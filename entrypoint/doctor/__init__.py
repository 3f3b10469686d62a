"""What `relaunch doctor` reads (`read_*`), and how it judges what was read (`judge_*`, pure)."""
