"""B52: an owner that is killed again and again, and started with what it left."""

from pathlib import Path

from kvcache_pool.segment import reclaim
from tests.kvcache_pool.test_segment import OWNER, start

LIVES = 20


def test_twenty_killed_lives_leave_one_pools_bytes_and_another_instance_its_own(tmp_path: Path) -> None:
    neighbour = start(OWNER, str(tmp_path))
    try:
        assert neighbour.stdout is not None
        beside = Path(neighbour.stdout.readline().strip())
        size = beside.stat().st_size
        for _ in range(LIVES):
            owner = start(OWNER.replace('segment="owner"', 'segment="killed"'), str(tmp_path))
            try:
                assert owner.stdout is not None
                mine = Path(owner.stdout.readline().strip())
                assert {path for path in tmp_path.iterdir() if "-killed-" in path.name} == {mine}
                assert beside.exists()
                assert sum(path.stat().st_size for path in tmp_path.glob("dango-*-test*")) == 2 * size
            finally:
                owner.kill()
                _, errors = owner.communicate(timeout=10)
            assert errors == ""
        assert mine in reclaim(tmp_path)
        assert beside.exists()
    finally:
        neighbour.kill()
        neighbour.communicate(timeout=10)
