"""The forwarder's pipeline on Spark. Needs the extra ``forwarder``."""
