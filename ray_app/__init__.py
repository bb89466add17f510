"""The service on Ray. Importing it loads neither Ray nor torch."""

from ray_app.distributed import distributed as distributed  # the decorator, from here on, rather than its module
