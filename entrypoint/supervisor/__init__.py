"""`relaunch serve`: the loop that feeds events to the state machine and carries out its actions."""
