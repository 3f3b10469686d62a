"""What this host is and does: one probe for each fact, used by every other room."""
