"""Views of what was decided and of what ran: plans, timelines, pictures, measured peaks."""
