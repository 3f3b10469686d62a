"""What people read: tables, the plan as text, the terminal header, labels and shell completion."""
