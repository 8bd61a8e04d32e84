"""Messages with tensors between processes, by shared memory and sockets, that fail without killing anybody."""

from fzero.channels.connection import Connection as Connection
from fzero.channels.listener import Address as Address
from fzero.channels.listener import Listener as Listener
from fzero.channels.listener import connect as connect
from fzero.channels.wire import BadMessage as BadMessage
from fzero.channels.wire import ChannelError as ChannelError
from fzero.channels.wire import Closed as Closed
from fzero.channels.wire import Refused as Refused
from fzero.channels.wire import TimedOut as TimedOut
