from helpers.user_cache import own_user_cache

__all__ = ["own_user_cache"]
