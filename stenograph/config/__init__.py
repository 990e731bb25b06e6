"""What the user asked for -> what will run. No torch in here: `steno explain` starts in a fraction of a second."""
