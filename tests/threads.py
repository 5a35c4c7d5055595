"""Work in several threads at once."""

import threading


def in_threads(work, count):
    """Run the same work in so many threads, to its end."""
    threads = [threading.Thread(target=work) for _ in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
