"""Human evaluation: blinded studies of replies, the rating page, and analysis of the answers."""
