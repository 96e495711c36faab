"""HTTP: decode, call, encode.

Each endpoint is a small function below an `endpoint` declaration that says everything about it (scopes, parameters, body,
answers): the same declaration routes it, checks its caller and describes it in the OpenAPI document. Bodies are read by `body`,
refusals are told by `problems`; no handler decides anything.
"""
