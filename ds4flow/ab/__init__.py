"""`ds4flow ab`: two configs on one machine, in turn, pair by pair."""
