"""When things happen: iterations, load history, planning and fetching ahead."""
