"""Human evaluation: blinded studies of replies, the page on which people rate them, and what their answers show."""
