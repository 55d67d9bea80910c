"""A service that a WSDL describes, for tests."""

from __future__ import annotations

NS = "https://warehouse.example.com/"
ENVELOPE = "http://schemas.xmlsoap.org/soap/envelope/"

WSDL = f"""<?xml version="1.0"?>
<definitions xmlns="http://schemas.xmlsoap.org/wsdl/" xmlns:t="{NS}" targetNamespace="{NS}"
    xmlns:soap="http://schemas.xmlsoap.org/wsdl/soap/" xmlns:x="http://www.w3.org/2001/XMLSchema">
  <types>
    <x:schema targetNamespace="{NS}" elementFormDefault="qualified">
      <x:element name="BookOrder"><x:complexType><x:sequence>
        <x:element name="order" type="x:string"/>
        <x:element name="total" type="x:int"/>
      </x:sequence></x:complexType></x:element>
      <x:element name="BookOrderResponse"><x:complexType><x:sequence>
        <x:element name="number" type="x:int"/>
        <x:element name="note" type="x:string"/>
      </x:sequence></x:complexType></x:element>
    </x:schema>
  </types>
  <message name="Asked"><part name="parameters" element="t:BookOrder"/></message>
  <message name="Told"><part name="parameters" element="t:BookOrderResponse"/></message>
  <portType name="Warehouse">
    <operation name="BookOrder"><input message="t:Asked"/><output message="t:Told"/></operation>
  </portType>
  <binding name="Binding" type="t:Warehouse">
    <soap:binding transport="http://schemas.xmlsoap.org/soap/http" style="document"/>
    <operation name="BookOrder">
      <soap:operation soapAction="{NS}BookOrder"/>
      <input><soap:body use="literal"/></input>
      <output><soap:body use="literal"/></output>
    </operation>
  </binding>
  <service name="Service">
    <port name="Port" binding="t:Binding">
      <soap:address location="http://nobody.invalid/"/>
    </port>
  </service>
</definitions>
"""


def envelope(inner: str) -> bytes:
    return f'<e:Envelope xmlns:e="{ENVELOPE}"><e:Body>{inner}</e:Body></e:Envelope>'.encode()
