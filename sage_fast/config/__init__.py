"""What a run is told: typed settings, the YAML they come from, and the names of pluggable parts."""
