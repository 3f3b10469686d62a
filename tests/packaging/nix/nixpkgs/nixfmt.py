"""Stand-in for nixfmt in tests: the part of its rules that can be checked line by line."""

import sys
from pathlib import Path

bad = 0
for path in (Path(word) for word in sys.argv[1:] if not word.startswith("--")):
    text = path.read_text()
    depth_string = False
    for number, line in enumerate(text.splitlines(), 1):
        problem = None
        if "\t" in line:
            problem = "a tab"
        elif line != line.rstrip():
            problem = "space at the end"
        elif not depth_string and (len(line) - len(line.lstrip())) % 2:
            problem = "odd indentation"
        if line.replace("'''", "").replace("''$", "").count("''") % 2:
            depth_string = not depth_string
        if problem:
            print(f"{path}:{number}: {problem}")
            bad = 1
    if not text.endswith("\n") or text.endswith("\n\n"):
        print(f"{path}: does not end in one newline")
        bad = 1
sys.exit(bad)
