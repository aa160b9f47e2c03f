"""How an instance lives: what it refuses before it has begun."""

import pytest

from protocol.ids import Incarnation
from protocol.instance import Role, Work, run_instance
from protocol.registry import Heard, Load, Pool
from protocol.zmq_transport import ZmqTransport
from tests.fakes import MANIFEST


@pytest.mark.parametrize("listen", ["tcp://0.0.0.0:0", "tcp://*:7000", "tcp://[::]:0"])
async def test_an_instance_does_not_tell_others_an_address_that_means_every_interface(listen: str) -> None:
    async def heard(news: Heard) -> None:
        raise AssertionError("nobody was asked")

    role = Role(Pool.DECODE, "decode-0", Incarnation("one"), "here", MANIFEST)
    transport = ZmqTransport()
    try:
        with pytest.raises(ValueError, match="this host's own address"):
            await run_instance(
                transport, role, Work({}, Load, heard), listen=listen, conductor="tcp://127.0.0.1:1"
            )
    finally:
        transport.close()
