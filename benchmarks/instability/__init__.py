"""Small trainings with injected faults, and what every signal says before they diverge."""
