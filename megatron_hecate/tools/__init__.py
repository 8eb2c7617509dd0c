"""Tools around training: metrics, traces, measuring the speeds of links and cores."""
