"""The HTTP API, one file per kind of caller; each route hands its body to the coordinator and returns the reply."""
