"""`kl-plugins doctor`: whether the plugin is what every worker will load, and whether its gradient is right there."""
