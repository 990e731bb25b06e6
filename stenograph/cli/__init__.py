"""`steno serve | generate | bench | explain | plan | version`: one file a command, no logic of its own, nothing heavy
imported before a command runs."""
