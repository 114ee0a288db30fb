"""Results of runs for readers: reports, tables, charts, model cards, summaries over seeds, scores of files."""
