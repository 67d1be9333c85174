"""Small models and data that the demo, the claims and the tests share."""
