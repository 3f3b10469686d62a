"""`relaunch doctor` reads the host (`read_host`) and judges what it read (`*_checks`, pure); `relaunch report`."""
