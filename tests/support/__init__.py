"""What several lanes share: a proxy that loses answers, processes under test, and a checker of histories."""
