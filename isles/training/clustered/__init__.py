"""Runs whose clusters train in asynchronous stages and average with each other (`pipeline.routing = "ravnest"`)."""
