"""A Streamlit client of the REST API."""
