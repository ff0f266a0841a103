"""What may be asked of the API and what it answers: types, checks, and the document made of them. Pure.

Knows neither who asks nor what becomes of a request.
"""
