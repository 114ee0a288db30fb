"""What runs found, for people: reports, tables, charts, model cards, sums over seeds, scores of files."""
