"""Capture: from a model, through Dynamo and AOTAutograd, to a joint graph."""
