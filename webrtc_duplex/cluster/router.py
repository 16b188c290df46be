"""Where a call goes: to the replica with the fewest, or nowhere at once if all are full.

Serve pickles this class by value, so this module imports nothing but Ray. The router API is alpha in Ray 2.60.
"""

from ray.serve.exceptions import BackPressureError
from ray.serve.request_router import FIFOMixin, PendingRequest, RequestRouter, RunningReplica


class RowRouter(FIFOMixin, RequestRouter):  # type: ignore[misc]
    """Refuses where Serve would queue.

    Serve asks again and again while it finds no replica with room. To be asked twice for the same future means that
    all were full: the future gets the error that the caller sees. The candidates are returned all the same, as the
    task that asks only looks at the future after it has tried them; with none it would stay in its back-off for ever.
    A retry after a race has another future, and deserves another pass.
    """

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """All candidates as one rank: Serve takes the one with the shortest queue."""
        if pending_request is not None:
            context, future = pending_request.routing_context, pending_request.future
            all_were_full = getattr(context, "asked", None) is future
            if all_were_full and not future.done():
                future.set_exception(BackPressureError(num_queued_requests=0, max_queued_requests=0))
            context.asked, context.should_backoff = future, True
        return [candidate_replicas]
